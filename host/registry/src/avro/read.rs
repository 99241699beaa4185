//! Decoder of Avro payloads.

use std::collections::HashSet;
use std::io::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{AvroSchema, Node, decimal};
use crate::json::{Bounded, JSON_BYTES_MAX};

/// Most values of a payload. The size of a payload is no bound: array elements may take no byte.
const VALUES_MAX: usize = 1_000_000;
/// Deepest nesting of values. A union adds no level.
const DEPTH_MAX: usize = 64;

impl AvroSchema {
    /// Decodes a payload and returns its JSON, with the name of its type if it has one.
    pub(crate) fn decode(&self, payload: &[u8]) -> Result<(Vec<u8>, Option<String>), String> {
        let mut reader = AvroReader {
            schema: self,
            rest: payload,
            out: Bounded::default(),
            values: 0,
            path: Vec::new(),
            name: None,
        };
        let read = reader.value(self.root).and_then(|()| match reader.rest {
            [] => Ok(()),
            rest => Err(format!("{} bytes are left over", rest.len())),
        });
        match read {
            Ok(()) => Ok((reader.out.0, reader.name)),
            Err(why) => Err(format!("{why} at `{}`", reader.place())),
        }
    }
}

/// A step from a value to one inside it.
enum PathStep<'s> {
    Field(&'s str),
    Index(usize),
    /// An entry of a map. Its key is data, which no error text may show.
    Key,
}

/// The decoder of one payload, which writes its JSON.
struct AvroReader<'s, 'p> {
    schema: &'s AvroSchema,
    rest: &'p [u8],
    out: Bounded,
    values: usize,
    path: Vec<PathStep<'s>>,
    /// Name of the payload's type; for a union, that of the branch in the payload.
    name: Option<String>,
}

type Read<T = ()> = Result<T, String>;

impl<'s, 'p> AvroReader<'s, 'p> {
    /// Returns the position of the reader in the JSON, as a JSON pointer.
    fn place(&self) -> String {
        let step = |step: &PathStep<'_>| match step {
            PathStep::Field(name) => format!("/{name}"),
            PathStep::Index(index) => format!("/{index}"),
            PathStep::Key => "/*".to_owned(),
        };
        self.path.iter().map(step).collect()
    }

    fn value(&mut self, node: usize) -> Read {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(format!("it has more than {VALUES_MAX} values"));
        }
        let schema = self.schema;
        let node = &schema.nodes[node];
        if self.path.is_empty() {
            self.name = node.name().map(str::to_owned);
        }
        match node {
            Node::Null => self.write("null"),
            Node::Boolean => match self.byte()? {
                0 => self.write("false"),
                1 => self.write("true"),
                _ => Err("a boolean is neither 0 nor 1".to_owned()),
            },
            Node::Int => match i32::try_from(self.long()?) {
                Ok(number) => self.write(&number.to_string()),
                Err(_) => Err("an int is larger than an int can be".to_owned()),
            },
            Node::Long => {
                let number = self.long()?;
                self.write(&number.to_string())
            }
            Node::Float => {
                let number = f32::from_le_bytes(self.array()?);
                self.float(
                    number.is_nan(),
                    number == f32::INFINITY,
                    number == f32::NEG_INFINITY,
                    &number,
                )
            }
            Node::Double => {
                let number = f64::from_le_bytes(self.array()?);
                self.float(
                    number.is_nan(),
                    number == f64::INFINITY,
                    number == f64::NEG_INFINITY,
                    &number,
                )
            }
            Node::Bytes => {
                let bytes = self.bytes()?;
                self.base64(bytes)
            }
            Node::Fixed { size, .. } => {
                let bytes = self.take(*size)?;
                self.base64(bytes)
            }
            Node::String => {
                let text = self.text()?;
                self.string(text)
            }
            Node::Enum { symbols, .. } => {
                let index = self.index()?;
                let symbol = symbols.get(index).ok_or("an enum has no such symbol")?;
                self.string(symbol)
            }
            Node::Union(branches) => {
                let index = self.index()?;
                let branch = branches.get(index).ok_or("a union has no such branch")?;
                self.value(*branch)
            }
            Node::Array(items) => self.items(*items),
            Node::Map(values) => self.entries(*values),
            Node::Record { fields, .. } => self.fields(fields),
            Node::Decimal { scale, size } => self.decimal(*scale, *size),
            Node::Uuid => self.uuid(),
            Node::Duration => self.duration(),
        }
    }

    fn within(&mut self, step: PathStep<'s>, node: usize) -> Read {
        self.path.push(step);
        if self.path.len() >= DEPTH_MAX {
            return Err(format!("it is nested more than {DEPTH_MAX} deep"));
        }
        self.value(node)?;
        self.path.pop();
        Ok(())
    }

    fn fields(&mut self, fields: &'s [(String, usize)]) -> Read {
        for (at, (name, node)) in fields.iter().enumerate() {
            self.write(if at == 0 { "{" } else { "," })?;
            self.string(name)?;
            self.write(":")?;
            self.within(PathStep::Field(name), *node)?;
        }
        self.write(if fields.is_empty() { "{}" } else { "}" })
    }

    fn items(&mut self, node: usize) -> Read {
        let mut count = 0;
        self.write("[")?;
        self.blocks(|reader| {
            if count > 0 {
                reader.write(",")?;
            }
            reader.within(PathStep::Index(count), node)?;
            count += 1;
            Ok(())
        })?;
        self.write("]")
    }

    fn entries(&mut self, node: usize) -> Read {
        let mut keys = HashSet::new();
        self.write("{")?;
        self.blocks(|reader| {
            let key = reader.text()?;
            // JSON parsers disagree on which of two equal keys counts.
            if !keys.insert(key) {
                return Err("a map has a key twice".to_owned());
            }
            if keys.len() > 1 {
                reader.write(",")?;
            }
            reader.string(key)?;
            reader.write(":")?;
            reader.within(PathStep::Key, node)
        })?;
        self.write("}")
    }

    /// Reads the blocks of an array or map, each with its count, up to an empty block. A negative
    /// count is followed by the block's size in bytes.
    fn blocks(&mut self, mut item: impl FnMut(&mut Self) -> Read) -> Read {
        loop {
            let count = self.long()?;
            if count < 0 {
                let size = self.long()?;
                usize::try_from(size)
                    .ok()
                    .filter(|size| *size <= self.rest.len())
                    .ok_or("a block is longer than what there is")?;
            }
            if count == 0 {
                return Ok(());
            }
            for _ in 0..count.unsigned_abs() {
                item(self)?;
            }
        }
    }

    fn decimal(&mut self, scale: usize, size: Option<usize>) -> Read {
        let bytes = match size {
            Some(size) => self.take(size)?,
            None => self.bytes()?,
        };
        if bytes.is_empty() || bytes.len() > decimal::DECIMAL_BYTES_MAX {
            return Err(format!(
                "a decimal has no byte, or more than {}",
                decimal::DECIMAL_BYTES_MAX
            ));
        }
        self.string(&decimal::digits(bytes, scale))
    }

    fn uuid(&mut self) -> Read {
        let hex: String = self.array::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect();
        self.string(&format!(
            "{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        ))
    }

    fn duration(&mut self) -> Read {
        let [months, days, millis] =
            [self.array()?, self.array()?, self.array()?].map(u32::from_le_bytes);
        self.write(&format!("{{\"months\":{months},\"days\":{days},\"millis\":{millis}}}"))
    }

    fn float(
        &mut self,
        is_nan: bool,
        is_infinite: bool,
        is_negative_infinite: bool,
        number: &impl serde::Serialize,
    ) -> Read {
        match () {
            () if is_nan => self.write("\"NaN\""),
            () if is_infinite => self.write("\"Infinity\""),
            () if is_negative_infinite => self.write("\"-Infinity\""),
            () => serde_json::to_writer(&mut self.out, number).map_err(|error| error.to_string()),
        }
    }

    fn write(&mut self, json: &str) -> Read {
        self.out.write_all(json.as_bytes()).map_err(|error| error.to_string())
    }

    fn string(&mut self, text: &str) -> Read {
        serde_json::to_writer(&mut self.out, text).map_err(|error| error.to_string())
    }

    fn base64(&mut self, bytes: &[u8]) -> Read {
        // Base64 is longer than its input: input over the bound is refused before it is encoded.
        if bytes.len() > JSON_BYTES_MAX {
            return self.out.write_all(bytes).map_err(|error| error.to_string());
        }
        self.string(&STANDARD.encode(bytes))
    }

    fn take(&mut self, count: usize) -> Read<&'p [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or("it ends too early")?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or("it ends too early")?;
        self.rest = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Read<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// Reads a zigzag number of at most ten bytes.
    fn long(&mut self) -> Read<i64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                break;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok((number >> 1) as i64 ^ -((number & 1) as i64));
            }
        }
        Err("a number has more than 64 bits".to_owned())
    }

    fn index(&mut self) -> Read<usize> {
        Ok(usize::try_from(self.long()?).unwrap_or(usize::MAX))
    }

    fn bytes(&mut self) -> Read<&'p [u8]> {
        let size = self.long()?;
        self.take(usize::try_from(size).map_err(|_| "a length is negative")?)
    }

    fn text(&mut self) -> Read<&'p str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| "a string is not UTF-8".to_owned())
    }
}

impl Node {
    fn name(&self) -> Option<&str> {
        match self {
            Self::Record { name, .. } | Self::Enum { name, .. } | Self::Fixed { name, .. } => {
                Some(name)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(text: &str) -> AvroSchema {
        AvroSchema::parse(text, &[]).expect("a schema of the test")
    }

    fn json(text: &str, payload: &[u8]) -> String {
        String::from_utf8(schema(text).decode(payload).expect("it decodes").0).expect("UTF-8")
    }

    fn fault(text: &str, payload: &[u8]) -> String {
        schema(text).decode(payload).expect_err("it does not decode")
    }

    fn record(fields: &str) -> String {
        format!(r#"{{"type":"record","name":"R","namespace":"a.b","fields":[{fields}]}}"#)
    }

    fn zigzag(number: i64) -> Vec<u8> {
        let mut number = ((number << 1) ^ (number >> 63)) as u64;
        let mut bytes = Vec::new();
        while number > 0x7f {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
        bytes
    }

    #[test]
    fn every_type_has_its_json() {
        let double = |number: f64| number.to_le_bytes().to_vec();
        for (schema, payload, expected) in [
            (r#""null""#, vec![], "null"),
            (r#""boolean""#, vec![1], "true"),
            (r#""boolean""#, vec![0], "false"),
            (r#""int""#, zigzag(-2_147_483_648), "-2147483648"),
            (r#""long""#, zigzag(9_007_199_254_740_993), "9007199254740993"),
            (r#""long""#, zigzag(i64::MIN), "-9223372036854775808"),
            (r#""long""#, zigzag(i64::MAX), "9223372036854775807"),
            (r#""float""#, 0.1_f32.to_le_bytes().to_vec(), "0.1"),
            (r#""float""#, f32::NAN.to_le_bytes().to_vec(), r#""NaN""#),
            (r#""double""#, double(-1.5e300), "-1.5e+300"),
            (r#""double""#, double(f64::INFINITY), r#""Infinity""#),
            (r#""double""#, double(f64::NEG_INFINITY), r#""-Infinity""#),
            (r#""string""#, b"\x08a\"\n\x01".to_vec(), r#""a\"\n\u0001""#),
            (r#""bytes""#, vec![4, 0xfb, 0xff], r#""+/8=""#),
            (r#"{"type":"fixed","name":"F","size":3}"#, vec![1, 2, 3], r#""AQID""#),
            (r#"{"type":"enum","name":"E","symbols":["A","B"]}"#, vec![2], r#""B""#),
            (r#"{"type":"array","items":"int"}"#, vec![4, 2, 4, 2, 6, 0], "[1,2,3]"),
            (r#"{"type":"array","items":"int"}"#, vec![3, 4, 2, 4, 0], "[1,2]"),
            (r#"{"type":"array","items":"int"}"#, vec![0], "[]"),
            (
                r#"{"type":"map","values":"int"}"#,
                vec![2, 2, b'k', 2, 1, 6, 2, b'l', 4, 0],
                r#"{"k":1,"l":2}"#,
            ),
            (r#"{"type":"map","values":"int"}"#, vec![0], "{}"),
            (r#"["null","string"]"#, vec![0], "null"),
            (r#"["null","string"]"#, vec![2, 2, b'x'], r#""x""#),
            (r#"{"type":{"type":"string","avro.java.string":"String"}}"#, vec![2, b'x'], r#""x""#),
            (
                r#"{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}"#,
                vec![4, 0xfb, 0x32],
                r#""-12.30""#,
            ),
            (
                r#"{"type":"fixed","name":"D","size":2,"logicalType":"decimal","precision":4}"#,
                vec![0x04, 0xce],
                r#""1230""#,
            ),
            (
                r#"{"type":"bytes","logicalType":"decimal","precision":1,"scale":2}"#,
                vec![2, 7],
                r#""Bw==""#,
            ),
            (r#"{"type":"string","logicalType":"uuid"}"#, vec![2, b'u'], r#""u""#),
            (
                r#"{"type":"fixed","name":"U","size":16,"logicalType":"uuid"}"#,
                (0..16).collect(),
                r#""00010203-0405-0607-0809-0a0b0c0d0e0f""#,
            ),
            (r#"{"type":"int","logicalType":"date"}"#, zigzag(19_723), "19723"),
            (r#"{"type":"int","logicalType":"time-millis"}"#, zigzag(1), "1"),
            (
                r#"{"type":"long","logicalType":"timestamp-micros"}"#,
                zigzag(1_700_000_000_000_001),
                "1700000000000001",
            ),
            (
                r#"{"type":"fixed","name":"P","size":12,"logicalType":"duration"}"#,
                vec![1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255],
                r#"{"months":1,"days":2,"millis":4294967295}"#,
            ),
            (r#"{"type":"bytes","logicalType":"of-tomorrow"}"#, vec![2, 0], r#""AA==""#),
        ] {
            assert_eq!(json(schema, &payload), expected, "{schema}");
        }
    }

    #[test]
    fn records_have_names_and_may_be_within_themselves() {
        let tree = record(r#"{"name":"value","type":"int"},{"name":"next","type":["null","R"]}"#);
        let (text, name) = schema(&tree).decode(&[2, 2, 4, 0]).expect("it decodes");
        assert_eq!(
            String::from_utf8(text).expect("UTF-8"),
            r#"{"value":1,"next":{"value":2,"next":null}}"#
        );
        assert_eq!(name.as_deref(), Some("a.b.R"));
        assert_eq!(json(&record(""), &[]), "{}");
        let either = r#"["null",{"type":"record","name":"x.A","fields":[]},{"type":"record","name":"B","fields":[]}]"#;
        let names = [0, 2, 4].map(|branch| schema(either).decode(&[branch]).expect("it decodes").1);
        assert_eq!(names.map(Option::unwrap_or_default), ["", "x.A", "B"]);
    }

    #[test]
    fn a_fault_says_where_and_tells_nothing_of_the_payload() {
        let items = record(
            r#"{"name":"items","type":{"type":"array","items":{"type":"record","name":"I","fields":[
            {"name":"price","type":"int"},{"name":"tags","type":{"type":"map","values":"boolean"}}]}}}"#,
        );
        assert_eq!(fault(&items, &[4, 2, 0]), "it ends too early at `/items/1/price`");
        assert_eq!(
            fault(&items, &[2, 2, 2, 12, b's', b'e', b'c', b'r', b'e', b't', 7]),
            "a boolean is neither 0 nor 1 at `/items/0/tags/*`"
        );
        for (schema, payload, why) in [
            (r#""int""#, &[][..], "it ends too early at ``"),
            (r#""int""#, &[2, 2, 2], "2 bytes are left over at ``"),
            (
                r#""int""#,
                &[0x80, 0x80, 0x80, 0x80, 0x20],
                "an int is larger than an int can be at ``",
            ),
            (r#""long""#, &[0xff; 11], "a number has more than 64 bits at ``"),
            (r#""string""#, &[2, 0xff], "a string is not UTF-8 at ``"),
            (r#""string""#, &[1], "a length is negative at ``"),
            (
                r#""bytes""#,
                &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
                "it ends too early at ``",
            ),
            (r#""double""#, &[0; 7], "it ends too early at ``"),
            (r#"["null"]"#, &[2], "a union has no such branch at ``"),
            (r#"["null"]"#, &[1], "a union has no such branch at ``"),
            ("[]", &[0], "a union has no such branch at ``"),
            (
                r#"{"type":"enum","name":"E","symbols":["A"]}"#,
                &[2],
                "an enum has no such symbol at ``",
            ),
            (r#"{"type":"array","items":"int"}"#, &[2, 2], "it ends too early at ``"),
            (
                r#"{"type":"array","items":"int"}"#,
                &[1, 20, 2, 0],
                "a block is longer than what there is at ``",
            ),
            (
                r#"{"type":"array","items":"int"}"#,
                &[1, 1, 2, 0],
                "a block is longer than what there is at ``",
            ),
            (
                r#"{"type":"map","values":"int"}"#,
                &[4, 2, b'k', 2, 2, b'k', 2, 0],
                "a map has a key twice at ``",
            ),
            (
                r#"{"type":"bytes","logicalType":"decimal","precision":4}"#,
                &[0],
                "a decimal has no byte, or more than 256 at ``",
            ),
        ] {
            assert_eq!(fault(schema, payload), why, "{schema}");
        }
    }

    /// What could go wrong: a few bytes take gigabytes, hours, or the whole stack.
    #[test]
    fn bombs_do_not_go_off() {
        let many = zigzag(i64::MAX);
        let too_many = "it has more than 1000000 values";
        for items in [
            r#""null""#,
            r#"{"type":"record","name":"Empty","fields":[]}"#,
            r#"{"type":"fixed","name":"F0","size":0}"#,
        ] {
            let array = format!(r#"{{"type":"array","items":{items}}}"#);
            assert!(fault(&array, &many).starts_with(too_many), "{items}");
        }
        // A count whose sign cannot be inverted.
        let smallest = [zigzag(i64::MIN), zigzag(0)].concat();
        assert!(fault(r#"{"type":"array","items":"null"}"#, &smallest).starts_with(too_many));
        let types: Vec<(String, String)> = (0..30)
            .map(|n| {
                let within = if n == 0 { "null".to_owned() } else { format!("R{}", n - 1) };
                let text = format!(
                    r#"{{"type":"record","name":"R{n}","fields":[{{"name":"a","type":"{within}"}},{{"name":"b","type":"{within}"}}]}}"#
                );
                (format!("R{n}"), text)
            })
            .collect();
        let doubled = AvroSchema::parse(r#""R29""#, &types)
            .expect("a schema")
            .decode(&[])
            .expect_err("too many");
        assert!(doubled.starts_with(too_many), "{doubled}");
        let endless = record(r#"{"name":"self","type":"R"}"#);
        assert!(fault(&endless, &[]).starts_with("it is nested more than 64 deep at `/self/self"));
        let list = record(r#"{"name":"next","type":["null","R"]}"#);
        assert!(fault(&list, &[2; 1_000_000]).starts_with("it is nested more than 64 deep"));
        let long_name = "n".repeat(1_000);
        let wide = format!(
            r#"{{"type":"array","items":{{"type":"record","name":"W","fields":[{{"name":"{long_name}","type":"null"}}]}}}}"#
        );
        assert!(fault(&wide, &many).starts_with("as JSON it is larger than 16 MiB"));
    }

    #[test]
    fn schemas_refer_to_types_by_name() {
        let item = r#"{"type":"record","name":"Item","namespace":"shop","fields":[{"name":"n","type":"int"}]}"#;
        let kind = r#"{"type":"enum","name":"shop.kinds.Kind","symbols":["A"]}"#;
        let order = r#"{"type":"record","name":"Order","namespace":"shop","fields":[
            {"name":"item","type":"Item"},{"name":"same","type":"shop.Item"},{"name":"kind","type":"shop.kinds.Kind"}]}"#;
        let references = [
            ("shop.Item".to_owned(), item.to_owned()),
            ("shop.kinds.Kind".to_owned(), kind.to_owned()),
        ];
        let schema = AvroSchema::parse(order, &references).expect("a schema");
        let (json, name) = schema.decode(&[2, 4, 0]).expect("it decodes");
        assert_eq!(
            String::from_utf8(json).expect("UTF-8"),
            r#"{"item":{"n":1},"same":{"n":2},"kind":"A"}"#
        );
        assert_eq!(name.as_deref(), Some("shop.Order"));
    }

    #[test]
    fn schemas_that_are_none_are_told() {
        let refused = |text: &str| AvroSchema::parse(text, &[]).expect_err("no schema");
        for (text, why) in [
            ("{", "it is no JSON, in line 1 at 1"),
            ("7", "a type is a string, an array or an object"),
            (r#""Nothing""#, "there is no type `Nothing`"),
            (r#"{"name":"x"}"#, "a type has no `type`"),
            (r#"{"type":"array"}"#, "a type has no `items`"),
            (r#"{"type":"record","name":"R"}"#, "the record `R` has no `fields`"),
            (r#"{"type":"record","fields":[]}"#, "a named type has no `name`"),
            (
                r#"{"type":"record","name":"a b","fields":[]}"#,
                "a type has a name that cannot be one",
            ),
            (
                r#"{"type":"record","name":"int","fields":[]}"#,
                "a type has a name that cannot be one",
            ),
            (r#"{"type":"fixed","name":"F"}"#, "the fixed `F` has no `size`"),
            (r#"{"type":"enum","name":"E","symbols":[1]}"#, "the enum `E` has no `symbols`"),
            (r#"[["null"]]"#, "a union is directly within a union"),
            (
                r#"[{"type":"fixed","name":"F","size":1},{"type":"fixed","name":"F","size":1}]"#,
                "there are two types `F`",
            ),
            (
                r#"{"type":"bytes","logicalType":"decimal","precision":2000,"scale":2000}"#,
                "a decimal has more than 256 bytes or a scale over 1000",
            ),
        ] {
            assert_eq!(refused(text), why, "{text}");
        }
        let twice = record(r#"{"name":"a","type":"int"},{"name":"a","type":"int"}"#);
        assert_eq!(refused(&twice), "the record `a.b.R` has two fields `a`");
        let deep = |depth: usize| {
            format!("{}\"int\"{}", r#"{"type":"array","items":"#.repeat(depth), "}".repeat(depth))
        };
        assert!(AvroSchema::parse(&deep(63), &[]).is_ok());
        assert_eq!(refused(&deep(64)), "it is nested more than 64 deep");
        assert!(refused(&deep(10_000)).starts_with("it is no JSON"));
        assert!(refused(&"[".repeat(250_000)).starts_with("it is no JSON"));
    }
}
