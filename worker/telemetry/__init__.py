"""What a worker says about itself: spans, metrics, the pulse of its loop, its HTTP server."""
