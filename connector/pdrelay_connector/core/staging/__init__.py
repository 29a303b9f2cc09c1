"""KV through host memory, where NIXL cannot or shall not reach the device."""
