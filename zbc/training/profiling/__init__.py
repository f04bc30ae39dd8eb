"""`zbc profile`: what layers cost, measured with the stages, handlers and transports that training runs."""
