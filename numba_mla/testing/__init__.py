"""What tests and benchmarks share: adversarial inputs and the one tolerance against the reference."""
