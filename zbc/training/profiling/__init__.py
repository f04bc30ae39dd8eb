"""`zbc profile`: costs of layers, measured with the stages, handlers and transports of training runs."""
