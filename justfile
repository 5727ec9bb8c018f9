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
    go test -race -short {{args}} . ./catalog ./groupcommit ./handlers ./maintain ./wake && go test -race -short {{args}} -run Concurrent ./dedup

# the load generator: just bench cycle -duration 10s
bench *args:
    go run ./bench {{args}}

# a broker with its own PostgreSQL under ./data
dev:
    LOG_LEVEL=debug go run .

# the HTTP contract, or one script of it: just contract longpoll
contract script="":
    go test ./contract -run 'TestContract/{{script}}'

# an empty migration: just migrate-new add_things
migrate-new NAME:
    n=$(ls schema/*.sql | wc -l) && f=$(printf 'schema/%05d_%s.sql' $((n + 1)) {{NAME}}) && printf -- '-- +goose Up\n\n-- +goose Down\n' > $f && echo $f

# everything that runs before a change is merged
ci:
    .ci/run
