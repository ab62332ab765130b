"""JobSpec in, `Plan` out: pure data that can be printed before any process exists."""
