"""`make bench`: what the broker does in a second, how late it is, how soon it is back, how much memory it takes.

The parts, from the outside in:
  __main__   the command: runs scenarios, prints the table, writes JSON
  scenarios  what is started in which order, one function a scenario; `rows` names the results and their targets
  pending    the scenarios with millions of messages in a broker's index; `probed_broker` is the broker of one of them
  index_scenarios, index   the index alone: what starts its process, and what runs in it
  cache      takes files out of the page cache
  processes  the broker and the clients as processes, pinned to one core each, and what they cost
  client     what runs in a client's process; nothing else here imports gRPC or the SDK
  peers      `make bench-peers`: the same work for Postdate and for what people would take instead
  machine    what the machine itself can do, measured in the same run
"""
