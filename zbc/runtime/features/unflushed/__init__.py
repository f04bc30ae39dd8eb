"""Steps that follow one another without a flush, on versions of the weights."""
