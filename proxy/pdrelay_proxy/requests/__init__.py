"""The life of one request: read, admitted, routed, prefilled, decoded, streamed."""
