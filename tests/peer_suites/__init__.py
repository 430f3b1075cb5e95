"""The test suites of libraries that redbolt can stand in for, run on redbolt: ``make peer-suites``."""
