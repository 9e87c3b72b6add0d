"""`make bench`: what the broker does in a second, how late it is, how soon it is back, how much memory it takes.

The parts, from the outside in:
  __main__   the command: runs scenarios, prints the table, writes JSON
  scenarios  what is started in which order, one function a scenario; `rows` names the results and their targets
  processes  the broker and the clients as processes, pinned to one core each, and what they cost
  client     what runs in a client's process; nothing else here imports gRPC or the SDK
  machine    what the machine itself can do, measured in the same run
"""
