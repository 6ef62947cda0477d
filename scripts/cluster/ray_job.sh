#!/usr/bin/env bash
# Upload a copy of the project to a Ray cluster, and start $recipe there as the job $id.
set -euo pipefail

copy="$$(mktemp -d)"
trap 'rm -rf -- "$$copy"' EXIT
ship() { tar -C "$$1" --anchored --exclude-from=$not_shipped -cf - "$${@:2}" | tar -C "$$copy" -xf -; }
ship $home .
$ship_recipe
size="$$(du -sm -- "$$copy" | cut -f1)"
echo "$id: the copy that is shipped has $$size MB, in $$(find "$$copy" -type f | wc -l) files"
if ((size > $limit_mb)); then
    echo "$id: Ray ships up to $limit_mb MB; move what is large out of $home, or name it in $not_shipped:" >&2
    (cd -- "$$copy" && du -am . | sort -rn | sed -n '2,6p') >&2
    exit 2
fi
# After a stop request the run finishes its step and writes a checkpoint. By default Ray would kill it after 3 s.
$ray job submit --no-wait --address $address --submission-id $id --working-dir "$$copy" \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "$stop_s"}}' \
    -- $command
