"""Models as ONNX graphs: jaxprs, written out operator by operator."""
