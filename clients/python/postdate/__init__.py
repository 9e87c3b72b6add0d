"""Postdate: send a message that arrives when its time has come."""
