-- Reads rows of a ledger, in the order in which they came.
-- 1  incarnation of the attempt that was read before, or '' for whichever is there
-- 2  step to read from
-- 3  bytes to read at once
-- Reply    OK, step to read on from, {records, failures, fields of the hash}, of each step {name of its field, value}
--          (false for what is not there) | RETIRED | CHANGED (another attempt) | ABSENT
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state then return reply('ABSENT', nil) end
if state.status == 'retired' then return reply('RETIRED', state) end
if arg(1) ~= '' and arg(1) ~= state.incarnation then return reply('CHANGED', state) end
local from, left = tonumber(arg(2)), tonumber(arg(3))
local traces = {}
for seq = from, math.min(tonumber(state.seq), from + 999) do traces[#traces + 1] = 'o:' .. seq end
traces = fetch(traces)
local rows = {}
while #rows < #traces and left > 0 do
  local trace = traces[#rows + 1]
  local field, names = read_trace(trace or nil)
  local value = names and redis.call('HGET', key, field)
  rows[#rows + 1] = {field or false, value or false}
  left = left - (value and #value or 0)
end
return reply('OK', state, from + #rows, {state.records, state.failures, redis.call('HLEN', key)}, rows)
