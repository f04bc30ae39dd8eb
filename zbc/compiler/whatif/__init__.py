"""Plans of changed jobs: comparisons, advice, noise, and single what-ifs."""
