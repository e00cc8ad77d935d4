// Judges a history of registers with porcupine: standard input has one operation per line as JSON.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

// An operation on the register with this key. A read has the value that was read, a write the value that was written.
type operation struct {
	Client  int    `json:"client"`
	Key     string `json:"key"`
	IsWrite bool   `json:"is_write"`
	Value   string `json:"value"`
	Call    int64  `json:"call"`
	Return  int64  `json:"return"`
}

func model() porcupine.Model {
	return porcupine.Model{
		Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
			byKey := map[string][]porcupine.Operation{}
			for _, op := range history {
				key := op.Input.(operation).Key
				byKey[key] = append(byKey[key], op)
			}
			var parts [][]porcupine.Operation
			for _, part := range byKey {
				parts = append(parts, part)
			}
			return parts
		},
		Init: func() interface{} { return "" },
		Step: func(state, input, output interface{}) (bool, interface{}) {
			op := input.(operation)
			if op.IsWrite {
				return true, op.Value
			}
			return state == op.Value, state
		},
	}
}

func main() {
	var history []porcupine.Operation
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var op operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			fmt.Println("not an operation:", err)
			os.Exit(2)
		}
		history = append(history, porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Call, Output: op.Value, Return: op.Return})
	}
	fmt.Printf("%d operations: %v\n", len(history), porcupine.CheckOperationsTimeout(model(), history, 10*time.Minute))
}
