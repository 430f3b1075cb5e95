"""The test kit: a scripted server, a fault-injecting proxy, and small helpers over real servers."""
