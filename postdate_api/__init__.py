"""The API of Postdate in Python: messages and stubs made from the protos, for the broker and its clients."""
