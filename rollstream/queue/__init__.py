"""The queue in Redis: keys, scripts, typed calls, and the two executors that run them."""
