"""logs/driver.log, the output of Ray and other libraries in the driver."""

PROVIDES = {"driver log": {"file": "driver_log:driver_log"}}
