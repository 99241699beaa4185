// As much JSON as a handler needs: one document is checked as a whole, then members of an object
// are read by name. Of members with the same name the last one counts. Texts are written as JSON.
#include "oncebox.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int DEPTH_MAX = 64;

static const char *space(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n", *at) && *at) at++;
    return at;
}

static bool is_digit(const char *at, const char *end) { return at < end && *at >= '0' && *at <= '9'; }

// Four hexadecimal digits; -1 for anything else.
static int hex4(const char *at, const char *end) {
    int value = 0;
    if (end - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char digit = at[i];
        bool is_letter = (digit >= 'a' && digit <= 'f') || (digit >= 'A' && digit <= 'F');
        if (!is_letter && (digit < '0' || digit > '9')) return -1;
        value = value * 16 + (is_letter ? (digit | 0x20) - 'a' + 10 : digit - '0');
    }
    return value;
}

static char *put(char *out, unsigned point) {
    if (point < 0x80) {
        *out++ = (char)point;
    } else if (point < 0x800) {
        *out++ = (char)(0xc0 | point >> 6);
        *out++ = (char)(0x80 | (point & 0x3f));
    } else if (point < 0x10000) {
        *out++ = (char)(0xe0 | point >> 12);
        *out++ = (char)(0x80 | (point >> 6 & 0x3f));
        *out++ = (char)(0x80 | (point & 0x3f));
    } else {
        *out++ = (char)(0xf0 | point >> 18);
        *out++ = (char)(0x80 | (point >> 12 & 0x3f));
        *out++ = (char)(0x80 | (point >> 6 & 0x3f));
        *out++ = (char)(0x80 | (point & 0x3f));
    }
    return out;
}

// Past a \u escape, a pair of surrogates included; half a pair is no character.
static const char *unicode(const char *at, const char *end, char **out) {
    int point = hex4(at, end);
    at += 4;
    if (point < 0 || (point >= 0xdc00 && point < 0xe000)) return NULL;
    if (point >= 0xd800 && point < 0xdc00) {
        int low = end - at >= 6 && at[0] == '\\' && at[1] == 'u' ? hex4(at + 2, end) : -1;
        if (low < 0xdc00 || low >= 0xe000) return NULL;
        point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
        at += 6;
    }
    *out = put(*out, (unsigned)point);
    return at;
}

// Past a string. Its text goes to `out`, where there is one; it is never longer than the string.
static const char *string(const char *at, const char *end, text_t *text) {
    if (at >= end || *at++ != '"') return NULL;
    char *start = malloc((size_t)(end - at) + 4), *out = start;
    if (!start) abort();
    while (at < end && *at != '"') {
        if ((unsigned char)*at < 0x20) return NULL;
        if (*at != '\\') {
            *out++ = *at++;
            continue;
        }
        if (++at >= end) return NULL;
        const char *plain = "\"\\/bfnrt", *means = "\"\\/\b\f\n\r\t", *found = *at ? strchr(plain, *at) : NULL;
        if (found) {
            *out++ = means[found - plain];
            at++;
        } else if (*at != 'u' || !(at = unicode(at + 1, end, &out))) {
            return NULL;
        }
    }
    if (at >= end) return NULL;
    if (text) {
        *text = (text_t){(uint8_t *)start, (size_t)(out - start)};
    } else {
        free(start);
    }
    return at + 1;
}

static const char *digits(const char *at, const char *end) {
    if (!is_digit(at, end)) return NULL;
    while (is_digit(at, end)) at++;
    return at;
}

static const char *number(const char *at, const char *end) {
    if (at < end && *at == '-') at++;
    if (at < end && *at == '0') {
        at++;
    } else if (!(at = digits(at, end))) {
        return NULL;
    }
    if (at < end && *at == '.' && !(at = digits(at + 1, end))) return NULL;
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        at = digits(at, end);
    }
    return at;
}

static const char *value(const char *at, const char *end, int depth);

// Past an object or an array. Where `name` is given, the last member of this name goes to `found`.
static const char *members(const char *at, const char *end, int depth, const char *name, json_t *found) {
    bool is_object = *at++ == '{', is_first = true;
    char close = is_object ? '}' : ']';
    for (;;) {
        text_t key = {0};
        at = space(at, end);
        if (is_first && at < end && *at == close) return at + 1;
        is_first = false;
        if (is_object) {
            if (!(at = string(at, end, &key))) return NULL;
            at = space(at, end);
            if (at >= end || *at++ != ':') return NULL;
            at = space(at, end);
        }
        const char *start = at;
        if (!(at = value(at, end, depth - 1))) return NULL;
        if (name && key.len == strlen(name) && !memcmp(key.ptr, name, key.len)) *found = (json_t){start, at};
        at = space(at, end);
        if (at >= end) return NULL;
        if (*at == close) return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static const char *value(const char *at, const char *end, int depth) {
    if (depth <= 0 || at >= end) return NULL;
    switch (*at) {
    case '{':
    case '[':
        return members(at, end, depth, NULL, NULL);
    case '"':
        return string(at, end, NULL);
    case 't':
        return end - at >= 4 && !memcmp(at, "true", 4) ? at + 4 : NULL;
    case 'f':
        return end - at >= 5 && !memcmp(at, "false", 5) ? at + 5 : NULL;
    case 'n':
        return end - at >= 4 && !memcmp(at, "null", 4) ? at + 4 : NULL;
    default:
        return number(at, end);
    }
}

// Well formed as RFC 3629 has it: no overlong forms, no surrogates, nothing beyond U+10FFFF.
static bool is_utf8(const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        uint8_t lead = *at++, low = 0x80, high = 0xbf;
        int more = lead < 0x80 ? 0 : lead >= 0xc2 && lead < 0xe0 ? 1 : lead >= 0xe0 && lead < 0xf0 ? 2 : lead >= 0xf0 && lead < 0xf5 ? 3 : -1;
        if (more < 0) return false;
        if (lead == 0xe0) low = 0xa0;
        if (lead == 0xed) high = 0x9f;
        if (lead == 0xf0) low = 0x90;
        if (lead == 0xf4) high = 0x8f;
        for (; more > 0; more--, low = 0x80, high = 0xbf) {
            if (at >= end || *at < low || *at > high) return false;
            at++;
        }
    }
    return true;
}

bool parse(const message_t *message, json_t *json) {
    if (!message->payload.is_some) return reject("the message has no payload");
    const handler_list_u8_t *bytes = &message->payload.val;
    const char *start = (const char *)bytes->ptr, *end = start + bytes->len;
    if (!is_utf8(bytes->ptr, bytes->ptr + bytes->len)) return reject("malformed payload: it is not UTF-8");
    const char *at = space(start, end);
    const char *past = value(at, end, DEPTH_MAX);
    if (!past || space(past, end) != end) return reject("malformed payload: it is not JSON");
    *json = (json_t){at, past};
    return true;
}

static bool member(json_t object, const char *name, json_t *found) {
    *found = (json_t){0};
    return *object.at == '{' && members(object.at, object.end, DEPTH_MAX, name, found) && found->at;
}

bool json_has(json_t object, const char *name) {
    json_t found;
    return member(object, name, &found);
}

bool json_text(json_t object, const char *name, text_t *text) {
    json_t found;
    return member(object, name, &found) && string(found.at, found.end, text) == found.end;
}

bool json_int(json_t object, const char *name, int64_t min, int64_t max, int64_t *result) {
    json_t found;
    if (!member(object, name, &found) || (*found.at != '-' && !is_digit(found.at, found.end))) return false;
    char *end;
    errno = 0;
    // The number ends before the document does, so the conversion cannot run past it.
    *result = strtoll(found.at, &end, 10);
    return !errno && end == found.end && *result >= min && *result <= max;
}

text_t json_quote(text_t text) {
    // A control character takes the most: six bytes.
    char *start = malloc(text.len * 6 + 3), *out = start;
    if (!start) abort();
    *out++ = '"';
    for (size_t i = 0; i < text.len; i++) {
        uint8_t byte = text.ptr[i];
        if (byte < 0x20) {
            out += sprintf(out, "\\u%04x", byte);
            continue;
        }
        if (byte == '"' || byte == '\\') *out++ = '\\';
        *out++ = (char)byte;
    }
    *out++ = '"';
    return (text_t){(uint8_t *)start, (size_t)(out - start)};
}
