"""The library broken on purpose, one rule at a time: a test suite that stays green on these would prove nothing."""
