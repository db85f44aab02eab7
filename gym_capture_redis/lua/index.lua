-- Says which calls are recorded, and what of them is needed to find the one that a request goes on from: no tokens of
-- full blocks, no log probabilities, no experts. Also of a frozen rollout.
-- 1  incarnation of the attempt that was read before, or '' for whichever is there
-- 2  step to read from
-- 3  bytes of records to look at in one step
-- Reply    OK, step to read on from, the same or the first step that is not there (it may be put back later),
--          calls: {name, beginning of the record} | RETIRED (also: another attempt) | ABSENT
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state then return reply('ABSENT', nil) end
if state.status == 'retired' or arg(1) ~= '' and arg(1) ~= state.incarnation then
  return reply('RETIRED', state)
end

-- A record with its first five pairs, and a few bytes more; all of it where their length cannot be told.
local function beginning(record)
  -- v and e. What comes then is too new for this library: c, 20 bytes; t, with a binary string from byte 6 on; p.
  local known, after = pcall(function() return cmsgpack.unpack_limit(record, 4, 1) end)
  local kind, long, short = string.byte(record, known and after + 27 or 0, known and after + 29 or 0)
  if not short then return record end
  local length = kind == 0xc4 and long + 2 or kind == 0xc5 and 256 * long + short + 3
  return length and string.sub(record, 1, after + 26 + length + 11) or record
end

local from, left = tonumber(arg(2)), tonumber(arg(3))
local traces = {}
for seq = from, math.min(tonumber(state.seq), from + 999) do traces[#traces + 1] = 'o:' .. seq end
traces = fetch(traces)
local calls, hole, at = {}, nil, 1
while at <= #traces and left > 0 do
  local field = traces[at] and read_trace(traces[at])
  if not field then
    hole = hole or from + at - 1
  elseif string.sub(field, 1, 2) == 'r:' then
    local record = redis.call('HGET', key, field)
    if record then
      calls[#calls + 1] = {string.sub(field, 3), beginning(record)}
      left = left - #record
    end
  end
  at = at + 1
end
local next_seq = from + at - 1
return reply('OK', state, next_seq, hole or next_seq, calls)
