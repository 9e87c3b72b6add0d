"""The API of Postdate as Python sees it: messages and stubs, generated from the protos, for the broker and its clients."""
