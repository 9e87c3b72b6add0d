"""Postdate's broker: messages stored durably, delivered when their time has come, never before."""
