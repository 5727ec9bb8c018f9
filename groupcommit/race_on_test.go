//go:build race

package groupcommit_test

const racing = true
