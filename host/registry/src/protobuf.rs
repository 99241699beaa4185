//! Protobuf schemas from their text, and payloads as canonical JSON.

mod cost;
mod parse;

use prost_reflect::{DynamicMessage, FileDescriptor, MessageDescriptor, SerializeOptions};

use crate::json::{Bounded, Shallow};

/// Most indexes of a payload: the deepest nesting of messages in a schema.
const INDEXES_MAX: usize = 32;

/// A linked Protobuf schema, by which payloads are decoded.
#[derive(Debug)]
pub(crate) struct ProtobufSchema {
    /// The registered file. Its pool holds the files that it imports.
    file: FileDescriptor,
}

impl ProtobufSchema {
    /// Decodes the indexes of a message in its file and the message behind them ([wire format]).
    /// Returns its JSON and its full name.
    ///
    /// [wire format]:
    /// https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
    pub(crate) fn decode(&self, mut body: &[u8]) -> Result<(Vec<u8>, String), String> {
        let descriptor = self.message(&indexes(&mut body)?)?;
        let name = descriptor.full_name().to_owned();
        cost::check(&descriptor, body)?;
        // The text of this error has field numbers and kinds of encoding, never a value.
        let message = DynamicMessage::decode(descriptor, body)
            .map_err(|error| format!("`{name}` is not read: {error}"))?;
        Ok((to_json(&message)?, name))
    }

    /// Finds a message by its index in the file, then by the index in each message around it. The
    /// messages that a map field generates for its entries are not counted.
    fn message(&self, indexes: &[usize]) -> Result<MessageDescriptor, String> {
        let missing = || "its schema has no message at the place that it names".to_owned();
        let (first, rest) = indexes.split_first().ok_or_else(missing)?;
        let mut found = self.file.messages().nth(*first).ok_or_else(missing)?;
        for index in rest {
            let child = found.child_messages().filter(|child| !child.is_map_entry()).nth(*index);
            found = child.ok_or_else(missing)?;
        }
        Ok(found)
    }
}

/// Reads the indexes: zigzag numbers behind their count. A count of 0 means the first message.
fn indexes(body: &mut &[u8]) -> Result<Vec<usize>, String> {
    let count = zigzag(body)?;
    if count == 0 {
        return Ok(vec![0]);
    }
    let count = usize::try_from(count).ok().filter(|count| *count <= INDEXES_MAX);
    let count = count.ok_or_else(|| {
        format!("the place of its message has more than {INDEXES_MAX} steps, or less than none")
    })?;
    (0..count)
        .map(|_| {
            usize::try_from(zigzag(body)?)
                .map_err(|_| "the place of its message is negative".to_owned())
        })
        .collect()
}

fn zigzag(body: &mut &[u8]) -> Result<i64, String> {
    let number = cost::varint(body).ok_or("the place of its message is cut off")?;
    Ok((number >> 1) as i64 ^ -((number & 1) as i64))
}

fn to_json(message: &DynamicMessage) -> Result<Vec<u8>, String> {
    let mut out = Bounded::default();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, Shallow::default());
    let options = SerializeOptions::new().skip_default_fields(false);
    match message.serialize_with_options(&mut serializer, &options) {
        Ok(()) => Ok(out.0),
        Err(error) if error.is_io() => Err(error.to_string()),
        // The text of this error would quote the value.
        Err(_) => {
            Err("it has a value of a well-known type that has no JSON, such as a time before \
            the year 1"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: &str = r#"
        syntax = "proto3";
        package shop;
        import "google/protobuf/timestamp.proto";
        import "google/protobuf/any.proto";
        import "confluent/meta.proto";
        import "shop/money.proto";
        option (confluent.file_meta).doc = "an option of a file that is not there";
        message Order {
            int64 order_id = 1 [(confluent.field_meta) = { doc: "…" params [{ key: "a" }] }];
            repeated Item items = 2;
            map<string, int32> counts = 3;
            Kind kind = 4;
            optional string note = 5;
            google.protobuf.Timestamp at = 6;
            money.Money total = 7;
            oneof way { bool by_sea = 8; bool by_air = 9; }
            google.protobuf.Any more = 10;
            repeated int32 packed = 11;
            bytes raw = 12;
            double ratio = 13;
            message Item { string name = 1; Item within = 2; message Size { int32 mm = 1; } }
            message Other { bool here = 1; }
            reserved 20 to 30;
        }
        enum Kind { option allow_alias = true; NONE = 0; NEW = 1; ALSO_NEW = 1; }
        message Second { uint32 n = 1; }
        service Shop { rpc Buy (Order) returns (Second) {} }
    "#;
    const MONEY: &str = "syntax = \"proto3\"; package money; message Money { int64 units = 1; }";

    fn schema() -> ProtobufSchema {
        ProtobufSchema::parse(ORDER, &[("shop/money.proto".to_owned(), MONEY.to_owned())])
            .expect("a schema")
    }

    fn json(payload: &[u8]) -> serde_json::Value {
        let (json, _) = schema().decode(payload).expect("it decodes");
        serde_json::from_slice(&json).expect("JSON")
    }

    #[test]
    fn a_message_has_its_canonical_json_with_defaults() {
        let empty = json(&[0]);
        let expected = serde_json::json!({ "orderId": "0", "items": [], "counts": {}, "kind": "NONE", "packed": [], "raw": "", "ratio": 0.0 });
        assert_eq!(empty, expected);
        let mut payload = vec![0, 0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
        payload.extend(b"\x12\x05\x0a\x01a\x12\x00"); // items[0] = { name: "a", within: {} }
        payload.extend(b"\x1a\x05\x0a\x01k\x10\x07\x1a\x05\x0a\x01k\x10\x08"); // counts k = 7, then 8
        payload.extend(b"\x20\x05\x2a\x00\x32\x02\x08\x01\x3a\x02\x08\x02\x48\x01"); // an unknown kind, note = "", at, total, by_air
        payload.extend(b"\x5a\x03\x01\x02\x03\x58\x04\x62\x01\xff\x98\x06\x01"); // packed and not, raw, field 99
        let expected = serde_json::json!({ "orderId": "9223372036854775807",
            "items": [{ "name": "a", "within": { "name": "" } }], "counts": { "k": 8 }, "kind": 5, "note": "",
            "at": "1970-01-01T00:00:01Z", "total": { "units": "2" }, "byAir": true, "packed": [1, 2, 3, 4],
            "raw": "/w==", "ratio": 0.0 });
        assert_eq!(json(&payload), expected);
    }

    #[test]
    fn the_message_is_the_one_at_the_indexes() {
        for (payload, name) in [
            (&[0][..], "shop.Order"),
            (&[2, 0], "shop.Order"),
            (&[2, 2], "shop.Second"),
            // The message of a map's entries is not counted.
            (&[4, 0, 0], "shop.Order.Item"),
            (&[4, 0, 2], "shop.Order.Other"),
            (&[6, 0, 0, 0], "shop.Order.Item.Size"),
        ] {
            assert_eq!(schema().decode(payload).expect("it decodes").1, name, "{payload:?}");
        }
        let missing = "its schema has no message at the place that it names";
        for (payload, why) in [
            (&[][..], "the place of its message is cut off"),
            (&[4, 0], "the place of its message is cut off"),
            (&[2, 4], missing),
            (&[4, 0, 4], missing),
            (&[2, 0xfe, 0xff, 0xff, 0xff, 0x1f], missing),
            (&[2, 1], "the place of its message is negative"),
            (&[1], "the place of its message has more than 32 steps, or less than none"),
            (
                &[0xfe, 0xff, 0xff, 0xff, 0x1f],
                "the place of its message has more than 32 steps, or less than none",
            ),
        ] {
            assert_eq!(schema().decode(payload).expect_err("no message"), why, "{payload:?}");
        }
    }

    #[test]
    fn a_fault_says_where_and_tells_nothing_of_the_payload() {
        let fault = |payload: &[u8]| {
            schema().decode(&[&[0], payload].concat()).expect_err("it does not decode")
        };
        for (payload, why) in [
            (&b"\x12\x04\x12\x02\x0a\x09"[..], "it ends too early at `/items/within`"),
            (b"\x08", "a number is cut off, or has more than 64 bits at ``"),
            (b"\x0e", "a field is encoded in no way that there is at ``"),
            (b"\x0c", "a field is encoded in no way that there is at ``"),
            (b"\xfb\x07", "a group has no end at `/*`"),
            (
                b"\x0d\x00\x00\x00\x00",
                "`shop.Order` is not read: failed to decode Protobuf message: invalid wire type: \
                    ThirtyTwoBit (expected Varint)",
            ),
            (
                b"\x2a\x01\xff",
                "`shop.Order` is not read: failed to decode Protobuf message: invalid string \
                    value: data is not UTF-8 encoded",
            ),
            (
                b"\x52\x08\x0a\x06secret",
                "an `Any` is of a type that is neither in its schema nor imported there at `/more`",
            ),
        ] {
            assert_eq!(fault(payload), why, "{payload:?}");
        }
        let long_ago = b"\x32\x0b\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01";
        assert!(
            fault(long_ago).starts_with("it has a value of a well-known type that has no JSON"),
            "{}",
            fault(long_ago)
        );
        let any = [field(1, b"/shop.Second"), field(2, &[8, 7])].concat();
        let any = json(&[vec![0], field(10, &any)].concat());
        assert_eq!(any["more"], serde_json::json!({ "@type": "/shop.Second", "n": 7 }));
    }

    fn varint(mut number: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while number > 0x7f {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
        bytes
    }

    /// Encodes a length-delimited field.
    fn field(number: usize, bytes: &[u8]) -> Vec<u8> {
        [varint(number << 3 | 2), varint(bytes.len()), bytes.to_vec()].concat()
    }

    /// What could go wrong: a few bytes take gigabytes, hours, or the whole stack.
    #[test]
    fn bombs_do_not_go_off() {
        let fault = |payload: &[u8]| {
            schema().decode(&[&[0], payload].concat()).expect_err("it does not decode")
        };
        let within = |depth: usize| (0..depth).fold(Vec::new(), |inner, _| field(2, &inner));
        assert!(
            fault(&within(20_000)).starts_with("it is nested more than 100 deep at `/items/within")
        );
        assert!(schema().decode(&[&[0][..], &within(40)].concat()).is_ok());
        let anys = |depth: usize| {
            (0..depth).fold(Vec::new(), |inner, _| {
                [field(1, b"/google.protobuf.Any"), field(2, &inner)].concat()
            })
        };
        assert!(
            fault(&field(10, &anys(2_000)))
                .starts_with("it is nested more than 100 deep at `/more/value/value")
        );
        assert!(fault(&[0x0b; 500_000]).starts_with("it is nested more than 100 deep"));
        assert!(
            fault(&field(11, &vec![0; 2_000_000]))
                .starts_with("it has more than 1000000 values at")
        );
        assert!(
            fault(&[0x12, 0x00].repeat(1_000_001))
                .starts_with("it has more than 1000000 values at")
        );
        let fields: String = (1..4_000).map(|n| format!("optional int32 a{n} = {n};")).collect();
        let wide =
            format!("syntax = \"proto3\"; message M {{ {fields} repeated M within = 5000; }}");
        let wide = ProtobufSchema::parse(&wide, &[]).expect("a schema");
        let many = [&[0][..], &field(5_000, &[]).repeat(100_000)].concat();
        assert!(
            wide.decode(&many)
                .expect_err("too much")
                .starts_with("it has too many messages for the number of their fields")
        );
        let named = format!(
            "syntax = \"proto3\"; message M {{ int32 {} = 1; repeated M within = 2; }}",
            "n".repeat(400)
        );
        let named = ProtobufSchema::parse(&named, &[]).expect("a schema");
        let many = [&[0][..], &[0x12, 0x00].repeat(100_000)].concat();
        assert!(
            named
                .decode(&many)
                .expect_err("too large")
                .starts_with("as JSON it is larger than 16 MiB")
        );
    }

    #[test]
    fn schemas_that_are_none_are_told() {
        let refused = |text: &str| ProtobufSchema::parse(text, &[]).expect_err("no schema");
        for (text, why) in [
            ("message", "expected an identifier, but reached end of file"),
            ("syntax = \"proto3\"; message M { Missing m = 1; }", "name 'Missing' is not defined"),
            (
                "syntax = \"proto3\"; import \"x.proto\"; message M { x.M m = 1; }",
                "name 'x.M' is not defined",
            ),
            (
                "syntax = \"proto3\"; message M { int32 a = 1; int32 b = 1; }",
                "number '1' is already used",
            ),
            (
                "package google.protobuf; message Any {}",
                "the package `google.protobuf` is not for others",
            ),
        ] {
            let found = refused(text);
            assert!(found.contains(why), "{found}");
        }
        let twice = [
            ("a", "syntax = \"proto3\"; import \"b\";"),
            ("b", "syntax = \"proto3\"; import \"a\";"),
        ];
        let twice = twice.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let circle = ProtobufSchema::parse("syntax = \"proto3\"; import \"a\";", &twice)
            .expect_err("a circle");
        assert_eq!(circle, "its imports lead back to themselves");
        let broken = [("a".to_owned(), "messag".to_owned())];
        assert!(
            ProtobufSchema::parse("", &broken)
                .expect_err("broken")
                .starts_with("in `a`, which it refers to: ")
        );
    }

    /// What could go wrong: a schema ends the process, or takes all its memory.
    #[test]
    fn hostile_schemas_are_refused() {
        let nested = |open: &str, close: &str| {
            format!("message A {{ {}{} }}", open.repeat(20_000), close.repeat(20_000))
        };
        for text in [
            nested("message M {", "}"),
            nested("optional group G = 1 {", "}"),
            nested("oneof o {", "}"),
            nested("extend A {", "}"),
            nested("map<string, ", ">"),
            format!("option a = {} ;", "{ a ".repeat(50_000)),
            format!("option a = {} {};", "{ a ".repeat(50_000), "}".repeat(50_000)),
            format!("option a = {};", "[".repeat(200_000)),
            "/*".repeat(100_000),
            "{".repeat(200_000),
            "\"\\".repeat(100_000),
        ] {
            let found = ProtobufSchema::parse(&text, &[]);
            // The parser drops options, so a schema with a hostile one may be accepted.
            assert!(found.is_err() || text.starts_with("option"), "{}", &text[..20]);
        }
        let long_package = format!("package {}; message M {{}}", vec!["a"; 100_000].join("."));
        assert_eq!(
            ProtobufSchema::parse(&long_package, &[]).expect_err("too long"),
            "it has a name of more than 512 bytes"
        );
        let values: String = (0..20_000).map(|n| format!("A{n}={n};")).collect();
        let values = format!("enum E {{ {values} }}");
        assert!(
            ProtobufSchema::parse(&values, &[])
                .expect_err("too many")
                .starts_with("it has more than 20000 messages")
        );
    }
}
