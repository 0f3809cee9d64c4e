"""What a training loop of any framework calls: `Balancer` behind a barrier, `Client` on parameter servers."""
