"""What the tests share: the pool of worker processes and Lightning's view of it."""
