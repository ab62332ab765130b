"""Where processes of one machine meet: nothing listens elsewhere unless a job spans several nodes."""

LOOPBACK = "127.0.0.1"
