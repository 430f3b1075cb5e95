"""The algorithms that wait or loop, once for threads and asyncio: generators of steps that do no I/O."""
