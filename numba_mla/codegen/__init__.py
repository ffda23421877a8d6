"""From tile operations to machine code: register blocks written as LLVM text, compiled, and found by address.

Nothing here names an instruction set: what differs between them stands in the records of ``numba_mla.isa``. Machine
code that was made is read by ``listing``, which knows the mnemonics of processors.
"""
