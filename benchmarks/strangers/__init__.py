"""What a stranger on the network can do to a broker: floods, and what a caller with rights notices of them."""
