package handlers

import (
	"testing"

	"ferrymq/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }
