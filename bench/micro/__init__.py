"""What the parts of a cycle cost, each by itself: ``make bench-micro``."""
