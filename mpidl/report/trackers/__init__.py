"""Record runs for other programs: TensorBoard, MLflow and Weights & Biases."""
