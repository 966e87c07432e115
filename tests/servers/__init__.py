"""What the tests start and talk to: real servers where a machine can have them, contract tests of APIs where not."""
