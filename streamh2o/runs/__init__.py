"""One run of anything, its sums and its saving."""
