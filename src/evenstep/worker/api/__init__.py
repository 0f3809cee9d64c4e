"""The API for training loops of any framework: `Balancer` behind a barrier, `Client` on parameter servers."""
