"""What several benchmarks and the tests of their exact figures share."""
