"""Holds gRPC to errors: unless it is told so, it writes a note of every failed handshake to stderr.

Errors alone are what its manual names as the default. It reads this when it is imported, and an operator's word counts.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
