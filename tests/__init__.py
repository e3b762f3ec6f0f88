"""Tests, laid out as src/ is. A package, so that ranks in other processes can import what a test hands them."""
