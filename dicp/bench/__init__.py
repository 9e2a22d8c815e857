"""dicp beside its peers: time, compile time, memory, overhead. `python -m dicp.bench --help`."""
