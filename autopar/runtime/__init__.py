"""What generated code imports. Never the compiler."""
