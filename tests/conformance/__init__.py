"""What every adapter of an environment library does, in process and on env_host: see `contract`.

To register an adapter, write `cases_<name>.py` beside this file with a list `CASES` of `AdapterCase`; put
environments of the library that it needs (one that raises in its step, say) into a module of `worlds/`.
"""
