"""Whether all is run that there is: `make test-all` asks for it, `make test` takes fewer cases of a kind."""

import os

IS_WHOLE = "GPURUN_TEST_ALL" in os.environ
