"""What all op benchmarks share; each module owns one part of the method."""
