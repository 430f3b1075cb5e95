"""The library broken on purpose, one rule at a time: a suite that stays green proves nothing."""
