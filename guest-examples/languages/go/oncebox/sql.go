package oncebox

import (
	"encoding/json"
	"fmt"
	"time"

	sql "example.com/order-placed/bindings/oncebox_handler_sql"
)

// Value of the contract, for types that Go has not: pass sql.MakeValueUuid(text) as a parameter.
type Value = sql.Value

// Row of an answer, by column name.
type Row map[string]any

// SQLError is a statement that failed. The transaction is lost unless it happened after a savepoint.
type SQLError struct {
	// State is PostgreSQL's code, such as 23505 for a key that is there already; empty when the host refused.
	State   string
	Message string
}

func (err *SQLError) Error() string {
	if err.State == "" {
		return err.Message
	}
	return err.State + ": " + err.Message
}

// Execute runs a statement for its effect and answers the number of rows it touched.
func Execute(statement string, params ...any) (uint64, error) {
	values, err := toValues(params)
	if err != nil {
		return 0, err
	}
	result := sql.Execute(statement, values)
	if result.IsErr() {
		return 0, sqlError(result.Err())
	}
	return result.Ok(), nil
}

// Query runs a statement and reads its rows.
func Query(statement string, params ...any) ([]Row, error) {
	values, err := toValues(params)
	if err != nil {
		return nil, err
	}
	result := sql.Query(statement, values)
	if result.IsErr() {
		return nil, sqlError(result.Err())
	}
	answer := result.Ok()
	rows := make([]Row, len(answer.Rows))
	for i, cells := range answer.Rows {
		rows[i] = make(Row, len(cells))
		for j, cell := range cells {
			rows[i][answer.Columns[j].Name] = fromValue(cell)
		}
	}
	return rows, nil
}

func sqlError(err sql.Error) error {
	switch err.Tag() {
	case sql.ErrorDatabase:
		database := err.Database()
		return &SQLError{State: database.Sqlstate, Message: database.Message}
	case sql.ErrorRefused:
		return &SQLError{Message: "refused: " + err.Refused()}
	case sql.ErrorUnsupported:
		return &SQLError{Message: "unsupported: " + err.Unsupported()}
	default:
		return &SQLError{Message: "limit: " + err.Limit()}
	}
}

func toValues(params []any) ([]Value, error) {
	values := make([]Value, len(params))
	for i, param := range params {
		switch param := param.(type) {
		case nil:
			values[i] = sql.MakeValueNull()
		case Value:
			values[i] = param
		case bool:
			values[i] = sql.MakeValueBoolean(param)
		case int:
			values[i] = sql.MakeValueInt8(int64(param))
		case int32:
			values[i] = sql.MakeValueInt8(int64(param))
		case int64:
			values[i] = sql.MakeValueInt8(param)
		case float64:
			values[i] = sql.MakeValueFloat8(param)
		case string:
			values[i] = sql.MakeValueText(param)
		case json.RawMessage:
			values[i] = sql.MakeValueJson(string(param))
		case []byte:
			values[i] = sql.MakeValueBytea(param)
		case time.Time:
			values[i] = sql.MakeValueTimestamptz(param.UnixMicro())
		default:
			return nil, fmt.Errorf("parameter $%d is a %T, which is no parameter; use a Value", i+1, param)
		}
	}
	return values, nil
}

func fromValue(value Value) any {
	switch value.Tag() {
	case sql.ValueNull:
		return nil
	case sql.ValueBoolean:
		return value.Boolean()
	case sql.ValueInt2:
		return int64(value.Int2())
	case sql.ValueInt4:
		return int64(value.Int4())
	case sql.ValueInt8:
		return value.Int8()
	case sql.ValueFloat4:
		return float64(value.Float4())
	case sql.ValueFloat8:
		return value.Float8()
	case sql.ValueNumeric:
		return value.Numeric()
	case sql.ValueText:
		return value.Text()
	case sql.ValueBytea:
		return value.Bytea()
	case sql.ValueUuid:
		return value.Uuid()
	case sql.ValueJson:
		return json.RawMessage(value.Json())
	case sql.ValueTimestamptz:
		return time.UnixMicro(value.Timestamptz()).UTC()
	default:
		return value // dates, intervals and arrays as the contract has them
	}
}
