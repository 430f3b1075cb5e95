"""The interfaces of other lock libraries, on redbolt's engines; one module per library."""
