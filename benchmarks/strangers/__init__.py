"""Floods by a stranger on the network, and what a caller with rights notices of them."""
