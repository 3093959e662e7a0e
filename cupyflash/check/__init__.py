"""What `verify` and all tests share: named cases, their inputs, the float64 reference, and the rule that judges."""
