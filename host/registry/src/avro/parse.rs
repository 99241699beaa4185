//! Parser of Avro schemas.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{AvroSchema, Node, decimal};

/// Deepest nesting of types in the text. The JSON parser has a limit of its own, 128.
const DEPTH_MAX: usize = 64;
/// Most bytes of a name with its namespace. Names are part of what is decoded.
const NAME_BYTES_MAX: usize = 1_024;

impl AvroSchema {
    /// Parses a schema and the schemas that it refers to. Each reference stands behind those that
    /// it refers to itself.
    pub(crate) fn parse(text: &str, references: &[(String, String)]) -> Result<Self, String> {
        let mut parser = Parser::default();
        for (name, text) in references {
            parser
                .parse_text(text)
                .map_err(|why| format!("in `{name}`, which it refers to: {why}"))?;
        }
        let root = parser.parse_text(text)?;
        Ok(Self { nodes: parser.nodes, root })
    }
}

/// The parser of a schema and its references.
#[derive(Default)]
struct Parser {
    nodes: Vec<Node>,
    /// Indexes of records, enums and fixed types by full name.
    names: HashMap<String, usize>,
    depth: usize,
}

impl Parser {
    fn parse_text(&mut self, text: &str) -> Result<usize, String> {
        let value = serde_json::from_str(text);
        let value = value.map_err(|error| {
            format!("it is no JSON, in line {} at {}", error.line(), error.column())
        })?;
        self.depth = 0;
        self.parse(&value, "")
    }

    fn parse(&mut self, schema: &Value, namespace: &str) -> Result<usize, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("it is nested more than {DEPTH_MAX} deep"));
        }
        let node = match schema {
            Value::String(name) => self.parse_name(name, namespace),
            Value::Array(branches) => self.parse_union(branches, namespace),
            Value::Object(members) => self.parse_object(members, namespace),
            _ => Err("a type is a string, an array or an object".to_owned()),
        };
        self.depth -= 1;
        node
    }

    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn parse_name(&mut self, name: &str, namespace: &str) -> Result<usize, String> {
        if let Some(node) = primitive(name) {
            return Ok(self.add(node));
        }
        let known = self.names.get(&full_name(name, namespace)).or_else(|| self.names.get(name));
        known.copied().ok_or_else(|| format!("there is no type `{name}`"))
    }

    fn parse_union(&mut self, branches: &[Value], namespace: &str) -> Result<usize, String> {
        let branches: Vec<usize> = branches
            .iter()
            .map(|branch| self.parse(branch, namespace))
            .collect::<Result<_, _>>()?;
        // The reader would follow a chain of unions without counting a value in between.
        if branches.iter().any(|branch| matches!(self.nodes[*branch], Node::Union(_))) {
            return Err("a union is directly within a union".to_owned());
        }
        Ok(self.add(Node::Union(branches)))
    }

    fn parse_object(
        &mut self,
        members: &Map<String, Value>,
        namespace: &str,
    ) -> Result<usize, String> {
        let kind = match members.get("type") {
            Some(Value::String(kind)) => kind.as_str(),
            Some(inner) => return self.parse(inner, namespace),
            None => return Err("a type has no `type`".to_owned()),
        };
        let node = match kind {
            "record" | "error" => return self.parse_record(members, namespace),
            "array" => Node::Array(self.parse_member(members, "items", namespace)?),
            "map" => Node::Map(self.parse_member(members, "values", namespace)?),
            "enum" => {
                let name = self.name_of(members, namespace)?.0;
                let symbols = strings(members, "symbols")
                    .ok_or_else(|| format!("the enum `{name}` has no `symbols`"))?;
                return self.add_named(name.clone(), Node::Enum { name, symbols });
            }
            "fixed" => {
                let name = self.name_of(members, namespace)?.0;
                let size = members
                    .get("size")
                    .and_then(Value::as_u64)
                    .and_then(|size| usize::try_from(size).ok());
                let size = size.ok_or_else(|| format!("the fixed `{name}` has no `size`"))?;
                let node = logical(members, Some(size))?
                    .unwrap_or(Node::Fixed { name: name.clone(), size });
                return self.add_named(name, node);
            }
            "bytes" => logical(members, None)?.unwrap_or(Node::Bytes),
            name => return self.parse_name(name, namespace),
        };
        Ok(self.add(node))
    }

    fn parse_member(
        &mut self,
        members: &Map<String, Value>,
        key: &str,
        namespace: &str,
    ) -> Result<usize, String> {
        let member = members.get(key).ok_or_else(|| format!("a type has no `{key}`"))?;
        self.parse(member, namespace)
    }

    fn parse_record(
        &mut self,
        members: &Map<String, Value>,
        namespace: &str,
    ) -> Result<usize, String> {
        let (name, namespace) = self.name_of(members, namespace)?;
        // The name is registered before the fields are parsed: a field may have this very type.
        let record = self.add_named(name.clone(), Node::Null)?;
        let found = members
            .get("fields")
            .and_then(Value::as_array)
            .ok_or_else(|| format!("the record `{name}` has no `fields`"))?;
        let mut fields: Vec<(String, usize)> = Vec::with_capacity(found.len());
        let mut seen = std::collections::HashSet::new();
        for field in found {
            let field =
                field.as_object().ok_or_else(|| format!("a field of `{name}` is no object"))?;
            let field_name = field.get("name").and_then(Value::as_str).filter(|name| is_name(name));
            let field_name = field_name
                .ok_or_else(|| format!("a field of `{name}` has no name that can be one"))?;
            if !seen.insert(field_name) {
                return Err(format!("the record `{name}` has two fields `{field_name}`"));
            }
            fields.push((field_name.to_owned(), self.parse_member(field, "type", &namespace)?));
        }
        self.nodes[record] = Node::Record { name, fields };
        Ok(record)
    }

    fn add_named(&mut self, name: String, node: Node) -> Result<usize, String> {
        if self.names.contains_key(&name) {
            return Err(format!("there are two types `{name}`"));
        }
        let place = self.add(node);
        self.names.insert(name, place);
        Ok(place)
    }

    /// Returns the full name of a type, and its namespace.
    fn name_of(
        &self,
        members: &Map<String, Value>,
        around: &str,
    ) -> Result<(String, String), String> {
        let name =
            members.get("name").and_then(Value::as_str).ok_or("a named type has no `name`")?;
        let namespace = members.get("namespace").and_then(Value::as_str).unwrap_or(around);
        let name = full_name(name, namespace);
        let (namespace, simple) = name.rsplit_once('.').unwrap_or(("", &name));
        if !is_name(simple)
            || name.len() > NAME_BYTES_MAX
            || name.contains(char::is_control)
            || primitive(&name).is_some()
        {
            return Err("a type has a name that cannot be one".to_owned());
        }
        Ok((name.clone(), namespace.to_owned()))
    }
}

/// Joins a namespace and a name. A name with a dot is complete by itself.
fn full_name(name: &str, namespace: &str) -> String {
    match namespace {
        _ if name.contains('.') => name.trim_start_matches('.').to_owned(),
        "" => name.to_owned(),
        _ => format!("{namespace}.{name}"),
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name.chars().all(|c| c.is_alphanumeric() || c == '_')
}

fn primitive(name: &str) -> Option<Node> {
    Some(match name {
        "null" => Node::Null,
        "boolean" => Node::Boolean,
        "int" => Node::Int,
        "long" => Node::Long,
        "float" => Node::Float,
        "double" => Node::Double,
        "bytes" => Node::Bytes,
        "string" => Node::String,
        _ => return None,
    })
}

/// Returns the node of a logical type over `bytes` or `fixed`, if it has one of its own. An invalid
/// logical type is ignored.
fn logical(members: &Map<String, Value>, size: Option<usize>) -> Result<Option<Node>, String> {
    let number = |key| members.get(key).and_then(Value::as_u64);
    Ok(match (members.get("logicalType").and_then(Value::as_str), size) {
        (Some("decimal"), _) => {
            let scale = number("scale").unwrap_or(0);
            if number("precision").is_none_or(|precision| precision == 0 || scale > precision) {
                return Ok(None);
            }
            let is_small = scale <= decimal::SCALE_MAX as u64
                && size.is_none_or(|size| size <= decimal::DECIMAL_BYTES_MAX);
            if !is_small {
                return Err(format!(
                    "a decimal has more than {} bytes or a scale over {}",
                    decimal::DECIMAL_BYTES_MAX,
                    decimal::SCALE_MAX
                ));
            }
            (size != Some(0)).then_some(Node::Decimal { scale: scale as usize, size })
        }
        (Some("uuid"), Some(16)) => Some(Node::Uuid),
        (Some("duration"), Some(12)) => Some(Node::Duration),
        _ => None,
    })
}

fn strings(members: &Map<String, Value>, key: &str) -> Option<Vec<String>> {
    members.get(key)?.as_array()?.iter().map(|value| value.as_str().map(str::to_owned)).collect()
}
